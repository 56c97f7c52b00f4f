"""Models of P(token | the tokens before it): base, recurrent, ngram, window."""
