// Names of TeX and the characters that they are. Each list alternates names and characters.

const pairs = (text) => Object.fromEntries(text.trim().split(/\s+/).reduce((found, one, i, all) => (i % 2 ? [...found, [all[i - 1], one]] : found), []));

export const LETTERS = pairs(`alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ lambda λ mu μ nu ν xi ξ
omicron ο pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω
Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω
hbar ℏ ell ℓ Re ℜ Im ℑ wp ℘ aleph ℵ beth ℶ imath ı jmath ȷ partial ∂ infty ∞ nabla ∇ emptyset ∅ varnothing ∅ top ⊤ bot ⊥ angle ∠ triangle △
ldots … dots … dotsc … cdots ⋯ dotsb ⋯ vdots ⋮ ddots ⋱ prime ′ degree ° square □ Box □ blacksquare ■ qed ∎ checkmark ✓ star ⋆ clubsuit ♣ spadesuit ♠ % % # # $ $ _ _`);

export const OPERATORS = pairs(`pm ± mp ∓ times × div ÷ cdot ⋅ ast ∗ circ ∘ bullet • oplus ⊕ ominus ⊖ otimes ⊗ odot ⊙ wedge ∧ land ∧ vee ∨ lor ∨ neg ¬ lnot ¬
cap ∩ cup ∪ setminus ∖ sqcup ⊔ uplus ⊎ dagger † ddagger ‡ amalg ⨿ wr ≀
leq ≤ le ≤ geq ≥ ge ≥ ll ≪ gg ≫ neq ≠ ne ≠ equiv ≡ approx ≈ sim ∼ simeq ≃ cong ≅ propto ∝ asymp ≍ doteq ≐ prec ≺ succ ≻ preceq ⪯ succeq ⪰
leqslant ⩽ geqslant ⩾ lesssim ≲ gtrsim ≳ lt < gt > triangleq ≜ coloneqq ≔ models ⊨ vdash ⊢ dashv ⊣ perp ⟂ parallel ∥ mid ∣ nmid ∤
in ∈ notin ∉ ni ∋ subset ⊂ supset ⊃ subseteq ⊆ supseteq ⊇ subsetneq ⊊ nsubseteq ⊈ forall ∀ exists ∃ nexists ∄ therefore ∴ because ∵ bowtie ⋈
to → rightarrow → leftarrow ← gets ← leftrightarrow ↔ Rightarrow ⇒ Leftarrow ⇐ Leftrightarrow ⇔ iff ⟺ implies ⟹ impliedby ⟸ mapsto ↦ longmapsto ⟼
longrightarrow ⟶ longleftarrow ⟵ Longrightarrow ⟹ Longleftrightarrow ⟺ uparrow ↑ downarrow ↓ updownarrow ↕ nearrow ↗ searrow ↘ hookrightarrow ↪ rightharpoonup ⇀
rightleftharpoons ⇌ leadsto ⇝ colon : vert | Vert ‖ lVert ‖ rVert ‖ lvert | rvert | langle ⟨ rangle ⟩ lceil ⌈ rceil ⌉ lfloor ⌊ rfloor ⌋ lbrace { rbrace } lbrack [ rbrack ] backslash \\ | ‖ & & { { } }`);

/** Operators that are large in a line of their own, and whether their bounds stand above and below then. */
export const BIG = pairs(`sum ∑ prod ∏ coprod ∐ bigcup ⋃ bigcap ⋂ bigoplus ⨁ bigotimes ⨂ bigvee ⋁ bigwedge ⋀ bigsqcup ⨆ int ∫ iint ∬ iiint ∭ oint ∮`);
export const BESIDE = new Set(["int", "iint", "iiint", "oint"]);

export const FUNCTIONS = new Set(("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth log ln lg exp det dim ker hom deg arg gcd lcm Pr "
  + "lim limsup liminf max min sup inf argmax argmin").split(" "));
export const BOUNDED = new Set("lim limsup liminf max min sup inf argmax argmin gcd det Pr".split(" "));

export const ACCENTS = pairs("hat ^ widehat ^ bar ¯ overline ¯ vec → overrightarrow → overleftarrow ← dot ˙ ddot ¨ tilde ~ widetilde ~ check ˇ breve ˘ acute ´ grave ` overbrace ⏞");
export const BELOW = pairs("underline _ underbrace ⏟");
export const SPACES = { ",": 0.167, ":": 0.222, ">": 0.222, ";": 0.278, "!": -0.167, " ": 0.25, quad: 1, qquad: 2, enspace: 0.5, thinspace: 0.167 };

/** Where the letters A, a and the digit 0 of a style of mathematics lie among all characters, and which letters lie elsewhere. */
export const STYLES = {
  mathbf: [0x1d400, 0x1d41a, 0x1d7ce, {}], bm: [0x1d468, 0x1d482, 0x1d7ce, {}], boldsymbol: [0x1d468, 0x1d482, 0x1d7ce, {}],
  mathbb: [0x1d538, 0x1d552, 0x1d7d8, pairs("C ℂ H ℍ N ℕ P ℙ Q ℚ R ℝ Z ℤ")],
  mathcal: [0x1d49c, 0x1d4b6, 0, pairs("B ℬ E ℰ F ℱ H ℋ I ℐ L ℒ M ℳ R ℛ e ℯ g ℊ o ℴ")],
  mathfrak: [0x1d504, 0x1d51e, 0, pairs("C ℭ H ℌ I ℑ R ℜ Z ℨ")],
  mathsf: [0x1d5a0, 0x1d5ba, 0x1d7e2, {}], mathtt: [0x1d670, 0x1d68a, 0x1d7f6, {}],
};
STYLES.mathscr = STYLES.mathcal;
