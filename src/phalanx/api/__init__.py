"""The functions of `import phalanx` that need more than one package. Users import them from `phalanx`."""
