"""What bounds a decoding step on a device: geometry, device constants, the terms of a step, and the paper's rows."""
