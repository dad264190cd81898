// Loads the libraries that the server embeds, each at its first use.
import { libraries } from "./libraries.js";

const loaded = new Map(); // name -> promise of the module or global object

/// Whether the server was built with the libraries.
export const hasLibraries = libraries !== null;

/// "marked 18.2.1" and the path of its license, for each library.
export const libraryList = Object.entries(libraries ?? {}).map(([name, { version, folder }]) => (
  { name: `${name} ${version}`, license: `${folder}LICENSE.txt` }));

function loadScript(path, globalName) {
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = path;
    script.onload = () => resolve(globalThis[globalName]);
    script.onerror = () => reject(new Error(`${path} could not be loaded`));
    document.head.append(script);
  });
}

function addStyles(path) {
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = path;
  // Before the page's own styles, which override some of it.
  document.head.prepend(link);
}

/// The library `name`: the default export of an ES module, the module itself, or the global that its script defines.
/// Options: `globalName` of a script, `styles`, a file beside it.
export function loadLibrary(name, { globalName, styles } = {}) {
  if (!hasLibraries) return Promise.reject(new Error(`the server was built without ${name}`));
  if (!loaded.has(name)) {
    const { folder, entry } = libraries[name];
    if (styles) addStyles(folder + styles);
    loaded.set(name, globalName ? loadScript(folder + entry, globalName)
      : import(new URL(`../${folder}${entry}`, import.meta.url)).then((module) => module.default ?? module));
  }
  return loaded.get(name);
}
