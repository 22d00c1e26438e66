"""The engine core: scheduler and executor stepped together, in process or as a process."""
