"""Measuring settings on the user's own engine, documents and questions."""
