// What the numbers of the page mean, in one place: for what is pointed at, and for who wants to read.

export const HELP = {
  particle: "One of the texts that grow side by side. In the end one of them is drawn as the answer, by its weight.",
  weight: "The particle's share of all weight at this step, before resampling: how likely it would be the answer if the run ended here.",
  nat: "The unit of natural logarithms: a difference of 1 nat is a factor of e, about 2.7, and of 2.3 nats one of 10.",
  "log-evidence":
    "Natural logarithm of the estimated evidence. With a constraint alone that is the probability that the model, left to itself, gives an answer that fits: −2.3 nats are one in 10, −7 one in 1,000. A reward multiplies each answer by exp(β · reward), so it may exceed 0. Without both it should be near 0, and what it differs by is chance.",
  "effective sample size":
    "ESS: so many particles of equal weight would be worth as much as these of different weights, 1/Σw². It is all particles if they weigh the same, and 1 if one has all the weight. Where it falls below the dotted line, the population is resampled: heavy particles are copied, light ones dropped.",
  "different texts":
    "How many final particles of different text have any weight; and how many texts of equal weight would be worth as much, 1/Σw² over the texts' shares of the weight. One text that has nearly all of it makes that about 1, however many there are.",
  "independent answers":
    "Particles that descend from the same particle of the first step are one family, and no independent evidence. This is how many families of equal weight would be worth as much: 1/Σw² over the families' shares of the weight. Near 1, the run has seen one answer only.",
  "KL to the model":
    "How far the answers that were asked for are from what the model says by itself (Kullback–Leibler divergence). 0 is the same; it takes more than about exp(KL) particles to find such answers.",
  "log p": "Natural logarithm of a token's probability under the target, the model whose answers are wanted; of a text, the sum over its tokens.",
  "log q̃": "The same under what the token was really drawn from: the draft or the target, restricted to the tokens that the constraint allows.",
  "log p − log q̃":
    "What a token adds to the logarithm of its particle's weight. Below 0, the target likes the token less than what proposed it (of a token drawn from the target: the constraint has taken away that much probability there); above 0, it likes the token more.",
  "tokens allowed": "How many of the vocabulary's tokens the constraint allowed where a token was drawn. With 1, the token was forced.",
  "block size": "K: how many tokens the draft proposes in each step, before the target looks at them and adds one. Without a draft, the target itself draws one token at each step.",
  resampled: "Steps after which heavy particles were copied and light ones dropped, out of all steps.",
  "particle tokens": "Tokens that all particles have drawn, with those that were dropped.",
  time: "Seconds of work for this prompt, the sum over the phases. Where several prompts share a batch, its share.",
  restarts: "Fresh starts because all particles had died.",
  seed: "The same seed gives the same run, on the same machine, with the same request.",
} as const;

export const PHASES: Record<string, string> = {
  draft: "the draft proposes tokens",
  mask: "the constraint says which tokens are allowed",
  verify: "the target looks at what was drafted, and draws one token more",
  potentials: "rewards and other scores",
  resample: "weights are compared, and particles copied or dropped",
};

export function Glossary() {
  return (
    <details class="glossary">
      <summary>What do the numbers mean?</summary>
      <dl>
        {Object.entries(HELP).map(([name, help]) => [<dt key={name}>{name}</dt>, <dd>{help}</dd>])}
        <dt>phases</dt>
        <dd>
          prefill: the prompt is read; {Object.entries(PHASES).map(([name, does]) => `${name}: ${does}`).join("; ")}.
        </dd>
      </dl>
    </details>
  );
}
