"""Device profiles: step times and capacities of emulated devices, with each number's origin."""
