"""Time and bytes of a layer, of the head and of a stage, on given hardware."""
