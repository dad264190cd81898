// Questions that the empty chat offers. The shipped model answers each of them with its sampling defaults.
export const EXAMPLES = [
  "What is the capital of France?",
  "In which country are the pyramids of Giza?",
  "What is the chemical formula of water?",
  "Write one sentence about the sea.",
];
