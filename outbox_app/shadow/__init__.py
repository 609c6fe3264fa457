"""Shadow mode: what staging would do, recorded and compared before it is switched on."""
