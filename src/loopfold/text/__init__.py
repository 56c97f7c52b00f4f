"""Text as tokens: corpus, vocabulary, streams."""
