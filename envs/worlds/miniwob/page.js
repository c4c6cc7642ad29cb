// What the environment does inside a page: begin an episode, read the page, find where to click.
"use strict";
window.agent = (() => {
  const HIDDEN = new Set(["query", "reward-display", "click-canvas", "sync-task-cover"]);
  const ARIA = new Set(["tab", "button", "link", "menuitem"]);
  const TEXT_INPUTS = new Set(["text", "password", "number", "input", "search", "email", "tel"]);
  const NAME_CHARS = 80;
  const TEXT_CHARS = 1000;
  let elements = [];

  const clean = (text, limit = NAME_CHARS) => text.replace(/\s+/g, " ").trim().slice(0, limit);

  const role = (element) => {
    const tag = element.tagName;
    if (tag === "BUTTON") return "button";
    if (tag === "SELECT") return "combobox";
    if (tag === "TEXTAREA") return "textarea";
    if (tag === "INPUT") return TEXT_INPUTS.has(element.type) ? "textbox" : element.type;
    if (ARIA.has(element.getAttribute("role"))) return element.getAttribute("role");
    const points = (e) => e && getComputedStyle(e).cursor === "pointer";
    return tag === "A" || (points(element) && !points(element.parentElement)) ? "link" : null;
  };

  const seen = (element) => element.getClientRects().length > 0 && getComputedStyle(element).visibility !== "hidden";

  const name = (element) => {
    if (element.tagName === "INPUT" || element.tagName === "TEXTAREA") {
      return clean(element.labels?.[0]?.textContent ?? element.placeholder ?? "");
    }
    return element.tagName === "SELECT" ? "" : clean(element.textContent);
  };

  const describe = (element, kind) => {
    let line = `[${elements.push(element)}] ${kind} '${name(element)}'`;
    if (kind === "checkbox" || kind === "radio") line += ` checked: ${element.checked ? "True" : "False"}`;
    else if (element.value && kind !== "button") line += ` value: '${clean(element.value)}'`;
    return element.disabled ? line + " disabled: True" : line;
  };

  const walk = (node, lines) => {
    for (const child of node.childNodes) {
      if (child.nodeType === Node.TEXT_NODE) {
        if (clean(child.textContent)) lines.push(clean(child.textContent, TEXT_CHARS));
        continue;
      }
      if (child.nodeType !== Node.ELEMENT_NODE || HIDDEN.has(child.id) || !seen(child)) continue;
      const kind = role(child);
      if (kind) lines.push(describe(child, kind));
      if (kind === "combobox") {
        for (const option of child.options) {
          const chosen = child.multiple && option.selected ? " selected: True" : "";
          lines.push(`\t[${elements.push(option)}] menuitem '${clean(option.text)}'${chosen}`);
        }
      } else if (child.tagName === "LABEL" && child.control?.matches("[type=checkbox], [type=radio]")) {
        walk({ childNodes: child.children }, lines); // Its text is the name of what it labels.
      } else if (!kind) {
        walk(child, lines);
      }
    }
  };

  const choose = (option) => {
    const list = option.closest("select");
    if (!list.multiple) option.selected = true;
    else option.selected = !option.selected;
    for (const type of ["input", "change"]) list.dispatchEvent(new Event(type, { bubbles: true }));
  };

  return {
    start(seed) {
      Math.seedrandom(seed);
      core.EPISODE_MAX_TIME = 1e9; // An agent thinks longer than ten seconds.
      core.startEpisodeReal();
      return WOB_TASK_READY;
    },
    read() {
      elements = [];
      const lines = [];
      if (!WOB_DONE_GLOBAL) walk(document.body, lines);
      const query = document.getElementById("query").textContent.replace(/\s+/g, " ").trim();
      return { query, lines, done: WOB_DONE_GLOBAL, reward: WOB_RAW_REWARD_GLOBAL };
    },
    // Returns where to click, or why there is nothing to click, or null for an option, which is chosen at once.
    aim(number) {
      const element = elements[number - 1];
      if (!element?.isConnected) return `There is no element [${number}] on the page.`;
      if (element.disabled) return `Element [${number}] is disabled.`;
      if (element.tagName === "OPTION") return choose(element) ?? null;
      element.scrollIntoViewIfNeeded();
      const box = element.getClientRects()[0];
      if (!box) return `Element [${number}] is hidden.`;
      // The middle first; where another element lies over it, whatever can be seen of it.
      for (const across of [0.5, 0.1, 0.9]) {
        for (const down of [0.5, 0.1, 0.9]) {
          const [x, y] = [box.x + box.width * across, box.y + box.height * down];
          if (element.contains(document.elementFromPoint(x, y))) return [x, y];
        }
      }
      return `Element [${number}] is covered by something else.`;
    },
    // Marks the text of a field for replacement; false when the field does not have the focus.
    select(number) {
      const element = elements[number - 1];
      if (document.activeElement !== element || !element.select) return false;
      element.select();
      return true;
    },
  };
})();
