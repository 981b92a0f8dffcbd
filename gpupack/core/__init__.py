"""Ground floor: errors, configuration, layouts and records; imports nothing else of gpupack."""
