// Questions that the empty chat offers. The shipped model should answer each of them.
export const EXAMPLES = [
  "What is the capital of France?",
  "Write a short greeting for a friend.",
  "What is 7 + 5?",
];
