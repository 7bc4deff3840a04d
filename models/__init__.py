"""Models with relative positions, built on timm's blocks."""

from lrpe_md.integrations.extras import require

require("timm")
