"""Device profiles: what a step costs on a device that is not there, with each number's origin."""
