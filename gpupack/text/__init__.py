"""Text from tokens: stop strings and incremental decoding."""
