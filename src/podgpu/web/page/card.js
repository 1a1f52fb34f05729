// The tile next to a square of the heat map: shown while the pointer is on the square, or until closed after a click.

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
    this.tile.element.addEventListener("click", (e) => e.target.closest("a") && this.hide());
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
    if (pinned)
      (this.element.querySelector(".tile-name") ?? this.close).focus({ preventScroll: true });
  }

  // Updates the tile, and hides it if its GPU no longer exists.
  refresh(devices) {
    if (this.element.hidden) return;
    const device = devices.get(this.key);
    if (device) this.tile.update(device, true);
    else this.hide();
  }

  move() {
    const at = this.square.getBoundingClientRect();
    const own = this.element.getBoundingClientRect();
    const below = at.bottom + MARGIN + own.height < innerHeight;
    const left = Math.min(Math.max(MARGIN, at.left - MARGIN), innerWidth - own.width - MARGIN);
    this.element.style.left = `${Math.max(MARGIN, left)}px`;
    this.element.style.top = `${below ? at.bottom + MARGIN : Math.max(MARGIN, at.top - MARGIN - own.height)}px`;
  }

  leave() {
    if (!this.pinned) this.element.hidden = true;
  }

  // Hides the tile. Returns true if it was visible.
  hide() {
    const shown = !this.element.hidden;
    const inside = this.element.contains(document.activeElement);
    this.element.hidden = true;
    this.pinned = false;
    if (inside) this.square?.focus({ preventScroll: true });
    this.element.hidden = true; // after the focus has moved, because focusing the square shows the tile again
    return shown;
  }
}
