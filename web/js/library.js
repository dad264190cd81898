// Loads each library that the server embeds at its first use.
import { libraries } from "./libraries.js";

const loaded = new Map(); // name -> promise of the module or global object

/// True if the server was built with the libraries.
export const hasLibraries = libraries !== null;

/// The name with version, e.g. "marked 18.2.1", and the path of the license of each library.
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
  // The page's own styles come after it, since they override some of its rules.
  document.head.prepend(link);
}

/// Resolves with the library `name`: the default export of an ES module, the module itself, or the global of a script.
/// `globalName` is the script's global, and `styles` a file in the same folder.
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
