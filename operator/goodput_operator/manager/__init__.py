"""The operator process: command line, Kopf handlers, leader election, probes and shutdown."""
