"""Small types on the public API alone, each a page: see README.md."""
