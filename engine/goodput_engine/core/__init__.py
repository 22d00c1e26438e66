"""The engine core: scheduler and executor, stepped together in virtual time or in a process."""
