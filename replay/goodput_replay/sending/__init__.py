"""When requests leave: deadlines, prepared bodies, the loop that sends, and who may stop it."""
