"""Measurements; see each module's own text for its command."""
