"""`python -m loopfold`, as `torchrun -m loopfold` needs it."""

from loopfold.cli import main

main()
