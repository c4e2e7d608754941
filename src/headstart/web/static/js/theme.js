// Runs before the page is drawn, so that it is not drawn in the other theme first. That is why it is no module.
"use strict";
{
  let theme = null;
  try {
    theme = localStorage.getItem("headstart.theme");
  } catch {
    // The browser stores nothing for this page.
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
}
