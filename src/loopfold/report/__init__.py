"""One page on a run, for a browser: markup, what it shows, the page."""
