"""Tests; a package so that `tests.tiny` can be imported by name."""
