"""Text to ids to parallel lanes of segments: tokenizers, corpora, preparation, streams."""
