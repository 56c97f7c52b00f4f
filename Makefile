# Every target sets up what it needs: a .venv, installed anew only when pyproject.toml or constraints.txt changes.
.PHONY: demo test check bench examples gallery docs screenshot format clean

demo: .venv/ready
	rm -rf runs/demo
	.venv/bin/loopfold train python-docs --out runs/demo
	.venv/bin/loopfold compare runs/demo
	.venv/bin/loopfold generate runs/demo --prompt 'The ' --temperature 0.8 --length 400
	@echo
	.venv/bin/loopfold report runs/demo
	.venv/bin/loopfold play --out runs/demo/play.html
	@echo 'The run folder is runs/demo; loopfold --help has more.'

test: .venv/ready
	.venv/bin/pytest -rs -n auto --dist worksteal

check: .venv/ready
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

bench: .venv/bench-ready
	.venv/bin/python benchmarks/engines.py
	.venv/bin/python benchmarks/output_recurrence.py
	.venv/bin/python benchmarks/feeding.py
	.venv/bin/python benchmarks/training.py
	.venv/bin/python benchmarks/short_sequences.py
	.venv/bin/python benchmarks/selfcheck.py
	.venv/bin/python benchmarks/stepper.py

examples: .venv/examples-ready
	.venv/bin/python examples/build.py

gallery: .venv/ready
	.venv/bin/python docs/gallery.py

docs: .venv/docs-ready gallery
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet
	@echo 'The site is in site: open site/index.html in a browser, online or not.'

screenshot: .venv/ready
	.venv/bin/python docs/screenshot.py runs/demo/report.html try

format: .venv/ready
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

.venv/ready: pyproject.toml constraints.txt
	python3 -m venv .venv
	.venv/bin/pip install --quiet --editable '.[dev]' --constraint constraints.txt
	touch $@

.venv/bench-ready: .venv/ready
	.venv/bin/pip install --quiet --editable '.[bench]' --constraint constraints.txt
	touch $@

.venv/examples-ready: .venv/ready
	.venv/bin/pip install --quiet --editable '.[examples]' --constraint constraints.txt
	touch $@

.venv/docs-ready: .venv/ready
	.venv/bin/pip install --quiet --editable '.[docs]' --constraint constraints.txt
	touch $@

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis runs/demo site
