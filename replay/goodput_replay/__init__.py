"""The replayer: fires a trace at its real timestamps and judges every request."""
