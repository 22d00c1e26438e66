"""The serving engine: scheduler, KV blocks, devices, executors, the OpenAI server, the router."""
