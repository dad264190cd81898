// Questions that the empty chat offers. The shipped model should answer each of them at its own sampling defaults.
export const EXAMPLES = [
  "Explain how photosynthesis works in simple words.",
  "What are three tips for a good night's sleep?",
  "What do plants need to grow?",
  "Why is the sky blue?",
];
