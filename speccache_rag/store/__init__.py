"""Where chunk KV is kept between requests: keys, codec, and tiers behind one contract."""
