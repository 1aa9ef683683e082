"""Kernels beside what the card can do at most."""

from attentions import measure_attention, measure_norms, measure_small_cache, measure_texts, measure_tiles
from latents import measure_draws, measure_latents
from products import measure_experts, measure_products, measure_rounding
from recurrents import measure_recurrents
from workbench import Part

PARTS = (
    Part("attention", measure_attention, 30),
    Part("products", measure_products, 30),
    Part("products of rounded inputs", measure_rounding, 30),
    Part("attention over 8 bits", measure_small_cache, 15),
    Part("attention of texts", measure_texts, 15),
    Part("norms", measure_norms, 15),
    Part("draws", measure_draws, 20),
    Part("experts", measure_experts, 20),
    Part("latent attention", measure_latents, 30),
    Part("layers with states", measure_recurrents, 20),
    Part("attention by tiles and splits", measure_tiles, 40),
)
