// Formats values for display. Unknown values are a dash, never zero.

export const UNKNOWN = "\u2013";
const GIB = 1024 ** 3;
const THIN = "\u202f";
const FIXED = "\u00a0"; // non-breaking space

export function percent(ratio) {
  if (ratio === undefined) return UNKNOWN;
  const hundredths = ratio * 100;
  if (hundredths > 0 && hundredths < 1) return `<1${THIN}%`;
  return `${Math.round(hundredths)}${THIN}%`;
}

// Formatters are expensive to create and cheap to use.
const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const PARTS = new Intl.NumberFormat("en", { maximumFractionDigits: 2 });
const TENTHS = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const THREE = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const SMALL = new Intl.NumberFormat("en", { maximumSignificantDigits: 2 });
const TIME = new Intl.DateTimeFormat(undefined, {
  hour: "2-digit",
  minute: "2-digit",
  hourCycle: "h23",
});
const SECOND = new Intl.DateTimeFormat(undefined, {
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
  hourCycle: "h23",
});
const DAY = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short" });
const DATE = new Intl.DateTimeFormat(undefined, {
  day: "numeric",
  month: "short",
  year: "numeric",
});

export function count(number) {
  return number === undefined ? UNKNOWN : WHOLE.format(number);
}

// Formats a number of GPUs: 7, 5.5, 3.43.
export function parts(number) {
  return PARTS.format(number);
}

export function gpuCount(number) {
  const unit = number === 1 ? "GPU" : "GPUs";
  return `${parts(number)} ${unit}`;
}

// A sum without the parts that are not known is a lower bound.
export function bounded(text, isLowerBound) {
  return isLowerBound ? `\u2265${THIN}${text}` : text;
}

// Joins texts and leaves out those that are empty, undefined or false.
export function listed(texts) {
  return texts.filter(Boolean).join(", ");
}

export function dotted(texts) {
  return texts.filter(Boolean).join(" \u00b7 ");
}

// Formats hours and similar amounts: 3,120.5, or 0.37 for small ones.
export function amount(number) {
  if (number > 0 && number < 0.01) return "<0.01";
  return Math.abs(number) < 1 ? SMALL.format(number) : TENTHS.format(number);
}

function gibibytes(bytes) {
  const amount = bytes / GIB;
  const digits = amount >= 100 || amount === 0 ? 0 : 1;
  return amount.toFixed(digits);
}

export function memory(bytes) {
  return bytes === undefined ? UNKNOWN : `${gibibytes(bytes)}${FIXED}GiB`;
}

export function memoryOf(used, total) {
  if (used === undefined || total === undefined) return memory(used ?? total);
  return `${gibibytes(used)} / ${gibibytes(total)}${FIXED}GiB`;
}

// Formats power: 386 W, 7.53 kW, 2.39 MW.
export function watts(power) {
  if (power === undefined) return UNKNOWN;
  if (power < 999.5) return `${Math.round(power)}${FIXED}W`;
  if (power < 999_500) return `${THREE.format(power / 1e3)}${FIXED}kW`;
  return `${THREE.format(power / 1e6)}${FIXED}MW`;
}

export function celsius(temperature) {
  return temperature === undefined ? UNKNOWN : `${Math.round(temperature)}${FIXED}\u00b0C`;
}

export function energy(joules) {
  if (joules === undefined) return UNKNOWN;
  const kilowattHours = joules / 3.6e6;
  if (kilowattHours < 0.1) return `${(kilowattHours * 1000).toFixed(1)}${FIXED}Wh`;
  return `${kilowattHours.toFixed(2)}${FIXED}kWh`;
}

export function duration(seconds) {
  if (seconds === undefined || !Number.isFinite(seconds)) return UNKNOWN;
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole}${FIXED}s`;
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return `${minutes}${FIXED}min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return `${hours}${FIXED}h ${minutes % 60}${FIXED}min`;
  return `${Math.floor(hours / 24)}${FIXED}d ${hours % 24}${FIXED}h`;
}

export function moment(unix) {
  const date = new Date(unix * 1000);
  // A time too far from now has no date.
  if (Number.isNaN(date.getTime())) return UNKNOWN;
  const isToday = date.toDateString() === new Date().toDateString();
  return isToday ? TIME.format(date) : `${day(date)} ${TIME.format(date)}`;
}

// Formats a date, with the year if it is not this year.
function day(date) {
  const isThisYear = date.getFullYear() === new Date().getFullYear();
  return isThisYear ? DAY.format(date) : DATE.format(date);
}

// Formats local time for an input of the type datetime-local: 2026-11-17T10:40.
export function localInput(unix) {
  const date = new Date(unix * 1000);
  if (Number.isNaN(date.getTime())) return "";
  const offset = date.getTimezoneOffset() * 60_000;
  return new Date(date.getTime() - offset).toISOString().slice(0, 16);
}

// Replaces the UTC times in a message of the server by local ones.
export function localTimes(text) {
  return text.replace(/\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ/g, (time) =>
    moment(Date.parse(time) / 1000),
  );
}

// Formats the bounds of a range, with their dates: Nov 16 10:00 to Nov 17 10:40 (24.7 h).
export function span(from, to) {
  const start = new Date(from * 1000);
  const end = new Date(to * 1000);
  const length = TENTHS.format((to - from) / 3600).replace(/\.0$/, "");
  const hours = `${length}${FIXED}h`;
  return `${day(start)} ${TIME.format(start)} to ${day(end)} ${TIME.format(end)} (${hours})`;
}

// Formats a time on an axis, with seconds if the steps are short.
export function clock(unix, isFine) {
  const date = new Date(unix * 1000);
  if (Number.isNaN(date.getTime())) return UNKNOWN;
  return isFine ? SECOND.format(date) : TIME.format(date);
}

const DECIMALS = new Map(); // of each currency
const MONEY = new Map(); // formats by currency and number of decimals
export const LEAST_MONEY = 1e-6; // less is a rounding error

// Formats money with the decimals of its currency: $1.50, \u00a5150. An amount that these would
// show as 0 has two significant digits: $0.0034.
export function money(amount, currency = "") {
  if (amount === undefined) return UNKNOWN;
  const digits = decimals(amount, currency);
  const key = `${digits} ${currency}`;
  if (!MONEY.has(key)) MONEY.set(key, moneyFormat(currency, digits));
  return MONEY.get(key)(amount);
}

// Returns the number of decimals that an amount is shown with.
export function decimals(amount, currency = "") {
  if (!DECIMALS.has(currency)) DECIMALS.set(currency, decimalsOf(currency));
  const usual = DECIMALS.get(currency);
  const size = Math.abs(amount);
  if (size < LEAST_MONEY || size >= 0.5 / 10 ** usual) return usual;
  return 1 - Math.floor(Math.log10(size));
}

function decimalsOf(currency) {
  return currencyFormat(currency)?.resolvedOptions().maximumFractionDigits ?? 2;
}

function moneyFormat(currency, digits) {
  const usual = DECIMALS.get(currency);
  const options = { minimumFractionDigits: usual, maximumFractionDigits: digits };
  const format = currencyFormat(currency, options);
  if (format) return (amount) => format.format(amount);

  const number = new Intl.NumberFormat("en", options);
  return (amount) => `${number.format(amount)} ${currency}`.trim();
}

function currencyFormat(currency, options = {}) {
  try {
    return new Intl.NumberFormat("en", { style: "currency", currency, ...options });
  } catch {
    return undefined; // not an ISO 4217 code
  }
}

// Formats a total: $44.64, $1,393, $19.6k, $2.39M.
export function totalMoney(amount, currency) {
  const exact = money(amount, currency);
  if (amount === undefined || amount < 999.995) return exact;
  return exact.replace(/[\d.,]+/, shortNumber(amount));
}

function shortNumber(amount) {
  if (amount < 9_999.5) return WHOLE.format(amount);
  if (amount < 999_500) return `${THREE.format(amount / 1e3)}k`;
  return `${THREE.format(amount / 1e6)}M`;
}

export function perHour(amount, currency) {
  return amount === undefined ? UNKNOWN : `${money(amount, currency)}/h`;
}

export function plural(number, singular, many = `${singular}s`) {
  const unit = number === 1 ? singular : many;
  return `${count(number)} ${unit}`;
}
