"""The loop over keys of the fused kernel; part of `decode_attention`."""
