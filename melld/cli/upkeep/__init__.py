"""Commands that change the daemon while it serves: workers out of service and back, and another daemon."""
