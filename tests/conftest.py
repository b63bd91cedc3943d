"""Fixtures that several test folders share, by topic."""

pytest_plugins = ["tests.fixtures_threads", "tests.fixtures_tokenizers"]
