"""Records, configuration, errors, metrics and the service shell: what every role shares. Imports no torch."""
