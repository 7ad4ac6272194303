"""What the project measures and publishes: experiments beside `cce_dist.bench`, and the evidence.

No part of the installed package. The commands start with `cce-dist bench` in a checkout.
"""
