"""What attention's splits of a request's keys left behind, added up; part of `decode_attention`."""
