"""Commands that change the running daemon: drain and resume workers, or replace the daemon."""
