"""What finished runs say, for people: tables, figures and the page."""
