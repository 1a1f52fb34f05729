// Shapes of lines over time, for the paths of charts and sparklines.

// Returns the runs of known values as points. A line is interrupted where a value is unknown.
// `x(i)` and `y(value)` return the position.
export function runsOf(values, x, y) {
  const runs = [];
  let run = [];
  values.forEach((value, i) => {
    if (!Number.isFinite(value)) {
      run = [];
      return;
    }
    if (!run.length) runs.push(run);
    run.push({ x: x(i), y: y(value) });
  });
  return runs;
}

// `digits`: decimals of y.
export function pointsText(run, digits) {
  return run.map((point) => `${point.x.toFixed(1)},${point.y.toFixed(digits)}`).join("L");
}

// Returns the shape between a line and the bottom edge. `points`: the text of its points.
export function areaOf(run, points, bottom) {
  const left = run[0].x.toFixed(1);
  const right = run.at(-1).x.toFixed(1);
  return `M${left},${bottom}L${points}L${right},${bottom}Z`;
}
