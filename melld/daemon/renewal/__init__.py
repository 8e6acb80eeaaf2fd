"""Renewal: a new daemon, with newer code or settings, takes over from this one without losing a stream."""
