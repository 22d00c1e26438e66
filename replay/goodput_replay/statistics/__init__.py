"""The statistics of one run: from its records to the evidence that a verdict is decided on."""
