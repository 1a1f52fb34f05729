// Prints what the page's table of pods shows for a view: the formatted text of each cell, by row and title.
// Arguments: the folder of the page, and the address of podgpu.
const [page, url] = process.argv.slice(2);
const { devicesOf } = await import(`${page}/devices.js`);
const { holderRows, holderColumns } = await import(`${page}/pods.js`);

const picture = await (await fetch(`${url}/api/v1/view`)).json();
const context = { now: () => picture.taken_at, prices: () => picture.currency };
const rows = holderRows(devicesOf(picture, picture.taken_at), "pod");
const cells = {};
for (const row of rows) {
  const name = row.namespace ? `${row.namespace}/${row.name}` : row.name;
  cells[name] = {};
  for (const { title, value } of holderColumns("pod", rows, context, true)) cells[name][title] = value(row);
}
console.log(JSON.stringify(cells));
