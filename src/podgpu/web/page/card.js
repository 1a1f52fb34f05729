// The tile next to a square of the heat map: shown while the pointer is on the square, or until
// closed after a click.

import { h } from "./dom.js";
import { Tile } from "./tile.js";

const MARGIN = 8;

export class Card {
  constructor(context) {
    this.tile = new Tile(context);
    this.close = h("button", { type: "button", class: "quiet card-close" }, "Close");
    this.close.addEventListener("click", () => this.hide());
    this.element = h(
      "div",
      { class: "card", role: "group", "aria-label": "Chosen GPU", hidden: true },
      this.close,
      this.tile.element,
    );
    this.tile.element.removeAttribute("tabindex");
    this.tile.element.addEventListener("click", (event) => {
      if (event.target.closest("a")) this.hide();
    });
    this.pinned = false;
    document.body.append(this.element);
  }

  show(device, square, pinned) {
    if (this.pinned && !pinned) return;
    this.square = square;
    this.key = device.key;
    this.pinned = pinned;
    this.close.hidden = !pinned;
    this.tile.update(device, true);
    this.element.hidden = false;
    this.move();
    if (!pinned) return;
    const name = this.element.querySelector(".tile-name");
    (name ?? this.close).focus({ preventScroll: true });
  }

  // Updates the tile, and hides it if its GPU no longer exists.
  refresh(devices) {
    if (this.element.hidden) return;
    const device = devices.get(this.key);
    if (device) this.tile.update(device, true);
    else this.hide();
  }

  // Moves below the square, or above it if there is no room. Stays in the window.
  move() {
    const square = this.square.getBoundingClientRect();
    const { width, height } = this.element.getBoundingClientRect();
    const below = square.bottom + MARGIN;
    const above = Math.max(MARGIN, square.top - MARGIN - height);
    const top = below + height < innerHeight ? below : above;
    const left = Math.min(square.left - MARGIN, innerWidth - width - MARGIN);
    this.element.style.left = `${Math.max(MARGIN, left)}px`;
    this.element.style.top = `${top}px`;
  }

  leave() {
    if (!this.pinned) this.element.hidden = true;
  }

  // Hides the tile. Returns true if it was visible.
  hide() {
    const wasShown = !this.element.hidden;
    const hadFocus = this.element.contains(document.activeElement);
    this.element.hidden = true;
    this.pinned = false;
    if (hadFocus) this.square?.focus({ preventScroll: true });
    // Once more, because focusing the square shows the tile.
    this.element.hidden = true;
    return wasShown;
  }
}
