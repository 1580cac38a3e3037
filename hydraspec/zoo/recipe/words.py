"""Word pools of the synthetic corpus. All lists are our own and carry no licence."""

from __future__ import annotations

NAMES = (
    "Ann", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Ivy", "Jack",
    "Kate", "Leo", "Mia", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Victor",
)  # fmt: skip

SURNAMES = (
    "Adler", "Baker", "Costa", "Dahl", "Evans", "Fischer", "Grant", "Hill", "Irwin", "Jensen",
    "Klein", "Lopez", "Moore", "Novak", "Olsen", "Perez", "Quinn", "Rossi", "Stone", "Weber",
)  # fmt: skip

CITIES = (
    "Athens", "Berlin", "Cairo", "Delhi", "Essen", "Florence", "Geneva", "Hanoi", "Izmir", "Jaipur",
    "Kyoto", "Lisbon", "Madrid", "Nairobi", "Oslo", "Porto", "Quito", "Riga", "Seville", "Turin",
)  # fmt: skip

JOBS = (
    "baker", "carpenter", "dentist", "engineer", "farmer", "gardener", "judge", "lawyer",
    "miner", "nurse", "painter", "pilot", "plumber", "sailor", "tailor", "teacher",
)  # fmt: skip

COLOURS = ("black", "blue", "brown", "green", "grey", "orange", "pink", "red", "white", "yellow")

ITEMS = (
    "apples", "books", "boxes", "buttons", "candles", "cards", "coins", "cups", "eggs", "keys",
    "lamps", "marbles", "pens", "plates", "ropes", "shells", "stamps", "stones", "tiles", "toys",
)  # fmt: skip

CONTAINERS = ("bags", "bins", "cases", "crates", "jars", "packs", "sacks", "trays")

# Plain nouns for sorting and reversing; a few share their first letters on purpose.
NOUNS = (
    "anchor", "arrow", "basket", "beach", "bridge", "bucket", "butter", "camel",
    "candle", "carpet", "castle", "cheese", "cloud", "copper", "corner", "desert",
    "dragon", "eagle", "engine", "feather", "field", "finger", "flower", "forest",
    "garden", "ginger", "hammer", "harbor", "helmet", "honey", "island", "jacket",
    "jungle", "kettle", "kitten", "ladder", "lemon", "letter", "magnet", "market",
    "meadow", "mirror", "monkey", "needle", "ocean", "onion", "orange", "palace",
    "paper", "pepper", "pillow", "planet", "pocket", "potato", "rabbit", "river",
    "rocket", "saddle", "salad", "shadow", "silver", "spider", "spoon", "sugar",
    "summer", "table", "temple", "thunder", "ticket", "tiger", "tunnel", "turtle",
    "valley", "velvet", "violin", "wagon", "walnut", "window", "winter", "zebra",
)  # fmt: skip

# (base form, third person present, simple past)
VERBS = (
    ("bake", "bakes", "baked"), ("bring", "brings", "brought"), ("build", "builds", "built"),
    ("buy", "buys", "bought"), ("carry", "carries", "carried"), ("catch", "catches", "caught"),
    ("choose", "chooses", "chose"), ("clean", "cleans", "cleaned"), ("draw", "draws", "drew"),
    ("find", "finds", "found"), ("hide", "hides", "hid"), ("hold", "holds", "held"),
    ("keep", "keeps", "kept"), ("lose", "loses", "lost"), ("move", "moves", "moved"),
    ("paint", "paints", "painted"), ("sell", "sells", "sold"), ("send", "sends", "sent"),
    ("steal", "steals", "stole"), ("take", "takes", "took"), ("throw", "throws", "threw"),
    ("wash", "washes", "washed"), ("watch", "watches", "watched"), ("wrap", "wraps", "wrapped"),
)  # fmt: skip

VARIABLES = (
    "age", "count", "height", "index", "length", "limit", "money", "number", "price", "score",
    "size", "speed", "step", "total", "value", "weight", "width", "year",
)  # fmt: skip

FUNCTION_VERBS = ("adjust", "change", "compute", "convert", "map", "reduce", "scale", "update")
