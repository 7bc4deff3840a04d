"""Models with relative position encodings, built from timm's layers."""

from lrpe_md.integrations.extras import require

require("timm")
