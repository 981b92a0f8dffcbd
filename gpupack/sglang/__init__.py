"""gpupack in an SGLang engine. Importing this package loads nothing of SGLang."""
