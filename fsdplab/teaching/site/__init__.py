"""The course as static pages: what somebody reads before anything is installed."""
