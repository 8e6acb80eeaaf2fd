"""Renewal: another daemon, of newer code or settings, takes over from this one without the loss of a stream."""
