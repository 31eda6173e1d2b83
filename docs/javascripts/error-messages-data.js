// By tools/error_messages.py.
window.kerasLsoMessages = [
 {
  "see": {
   "Saving and resuming": "saving.html",
   "The checkpoint does not load": "troubleshooting.html#the-checkpoint-does-not-load"
  },
  "messages": [
   "TypeError: ... takes an array of numbers. Received one of dtype ...: .... Nothing was assigned.",
   "TypeError: The config of the ... must hold a number or None as its '...'. Received: ...=... of type ...",
   "TypeError: `optimizer_config` is no dict",
   "ValueError: ... To load only the model, write `load_model(path, compile=False)` or `model.load_weights(path, skip_mismatch=True)`.",
   "ValueError: ... does not support `...`. Instead, set `...` on the `inner_optimizer`.",
   "ValueError: ... does not support arguments: `...`. Did you mean `...`?",
   "ValueError: ... has shape ..., but the array given for it has shape .... Nothing was assigned.",
   "ValueError: ... takes whole numbers from ... to .... Received: .... Nothing was assigned.",
   "ValueError: The `training_config` in a `.h5` file must be JSON, a dict with a dict as its `optimizer_config`. In this file it is not (...): the file is damaged.",
   "ValueError: The archive holds no `config.json` that can be read, a dict (...): it is no `.keras` file of Keras 3, or it is damaged.",
   "ValueError: The config of a ... must hold the config dict of its inner optimizer as 'inner_optimizer'. Received: inner_optimizer=...",
   "ValueError: The config of the ... does not fit the class that it names, ... (...: ...). Pass the return value of `keras.saving.serialize_keras_object`. If the config comes from a file, the file may be damaged, or from another version of the class.",
   "ValueError: The config of the ... must hold ... as its '...'. Received: ...=...",
   "ValueError: The config of the ... must hold numbers that are finite in float32. Received: ...=...",
   "ValueError: The file could not be loaded: it is damaged, or its config does not fit the classes that it names (...: ...). If tf.keras 2 wrote it, build the model in code, and call `model.load_weights(path)` and `keras_lso.mixed_precision.load_optimizer_state(optimizer, path)`. Received: filepath=...",
   "ValueError: The optimizer's variable '...' must be finite in .... The file holds .... Nothing was assigned.",
   "ValueError: The optimizer's variable '...' must not be NaN, but is in the file: the run that wrote it had diverged, or the file is damaged. Load an earlier file. Nothing was assigned.",
   "ValueError: The state of an optimizer is stored under the numbers of its variables, '0' to '...'. Missing: .... The file is damaged. Nothing was assigned.",
   "ValueError: Unknown optimizer class '...'. If it is your own class, pass it in `custom_objects`. Received: ...",
   "ValueError: `config` must describe an optimizer. It describes a ...: ...",
   "Warning: Only in a `.keras` or `.h5` file is Keras's LossScaleOptimizer replaced by ours. Compile the model with a `keras_lso.LossScaleOptimizer`, or save it as `.keras` first. Received: filepath=...",
   "Warning: Optimizer '...' begins with a new state: ...",
   "Warning: Optimizer '...' begins with a new state: the file holds ... variables for it, and it has .... If layers were frozen or unfrozen after the optimizer was built, build a new one for the variables that it was built for, and assign to its `variables`.",
   "Warning: Skipping variable loading for optimizer '...', because it has ... variables whereas the saved optimizer has ...variables....",
   "Warning: The model is not compiled: the losses and metrics in a file of tf.keras 2 are not those of Keras 3. Compile it, call `model.optimizer.build(model.trainable_variables)`, and then `keras_lso.mixed_precision.load_optimizer_state(model.optimizer, path)`. Received: filepath=..."
  ]
 },
 {
  "see": {
   "It skipped every step": "troubleshooting.html#it-skipped-every-step",
   "Every step on record": "long-runs.html#every-step-on-record"
  },
  "messages": [
   "FloatingPointError: The last ... steps were all skipped at the lowest loss scale (...): the gradients are inf or NaN at any scale. Look for inf or NaN in the data, and for a layer that overflows in float16, which `keras_lso.float16_report(model, x, y)` names. Without either the model itself has diverged: go back to a checkpoint, and lower the learning rate or clip the gradients (`global_clipnorm` of the inner optimizer).",
   "FloatingPointError: The last ... steps were all skipped. ...",
   "ValueError: The optimizer already records its steps, the last ... of them. Ask for the length that you need before the first step. Received: length=...",
   "ValueError: There is a record only after `optimizer....()`. Call it, and make a step."
  ]
 },
 {
  "see": {
   "It skipped every step": "troubleshooting.html#it-skipped-every-step",
   "Watch the loss scale": "troubleshooting.html#watch-the-loss-scale"
  },
  "messages": [
   "ValueError: `on_stall=\"restore\"` multiplies the learning rate, which must be a number or a schedule. Write the function as the `__call__` of a subclass of `LearningRateSchedule`, or `learning_rate_factor=1.0`. Received: learning_rate=...",
   "Warning: Layers whose gradients are not finite: ....",
   "Warning: Layers whose variables hold inf or NaN: ....",
   "Warning: Training has stalled. All steps since step ... were skipped at the lowest loss scale (...): the gradients are inf or NaN at any scale."
  ]
 },
 {
  "see": {
   "Without a loss scale": "which-setup.html#without-a-loss-scale",
   "Loops of your own": "custom-loops.html"
  },
  "messages": [
   "TypeError: Argument `dynamic` must be True or False. To start at a scale, write `initial_scale=...`; to fix it, add `dynamic=False`; for a loss-scale policy write `loss_scale=...`. Received: ...",
   "ValueError: LossScaleOptimizer scales the loss itself and has no `loss_scale_factor`. For a fixed scale write `LossScaleOptimizer(inner_optimizer, dynamic=False, initial_scale=...)`.",
   "ValueError: The inner optimizer has been built already, for 16-bit variables, and cannot train their float32 masters now. Pass an optimizer that has not been used, or master_weights=False. Received: inner_optimizer=...",
   "ValueError: To call `record_overflows`, LossScaleOptimizer must be built. Call `optimizer.build(trainable_variables)` first.",
   "ValueError: With `dynamic=False` the scale never moves: leave out its growth and its bounds. Received: ...",
   "ValueError: With `dynamic=False`, `initial_scale` must be given, for example `initial_scale=1024`: it is the fixed scale. (Keras's own class has none, and says: set `loss_scale_factor` on the inner optimizer.) Received: initial_scale=None",
   "ValueError: `axis_name` says that the gradients are still to be averaged, but `skip_gradients_aggregation=True` says that they are not. Give one of them. Received: axis_name=...",
   "ValueError: `loss_scale` is a whole loss-scale policy. Set the other arguments in its constructor, for example `loss_scale=keras_lso.loss_scales.DynamicLossScale(...)`. Received: loss_scale=..., ...",
   "Warning: GuardedOptimizer does not scale the loss, and float16 gradients need a loss scale: gradients below 6e-8 become 0. Write `LossScaleOptimizer(inner_optimizer)`, or use bfloat16. Received: ...",
   "Warning: LossScaleOptimizer scales the loss of a model without float16, which needs no loss scale. Write `GuardedOptimizer(inner_optimizer)`, or `keras.config.set_dtype_policy('mixed_float16')` before the layers are made. Received: a model that computes in ...",
   "Warning: The inner optimizer has loss_scale_factor=..., which would scale the loss twice. It has been set to None. For a fixed loss scale, leave it out and write `LossScaleOptimizer(inner_optimizer, dynamic=False, initial_scale=...)`."
  ]
 },
 {
  "see": {
   "Which loss scale?": "which-setup.html#which-loss-scale"
  },
  "messages": [
   "NotImplementedError: ... must override `step`.",
   "TypeError: Argument `policy` must be a `LossScale`. `keras_lso.loss_scales.get` makes one. Received: ...",
   "ValueError: A loss-scale policy belongs to one optimizer, and this ... already belongs to '...'. Make a new one: `....from_config(policy.get_config())`.",
   "ValueError: LogMaxLossScale needs the largest magnitude of the gradients, `amax`. Let `update(gradients)` find it. Received: amax=None"
  ]
 },
 {
  "see": {
   "Which schedule?": "schedules.html",
   "keras_lso.schedules": "api/schedules.html"
  },
  "messages": [
   "TypeError: Argument `schedule` must be a schedule. `keras_lso.schedules.get` makes one from a number. Received: ...",
   "ValueError: The config's `...` does not name the class of the schedule, which the Model Garden leaves out. Replace it with `keras.optimizers.schedules.serialize(schedule)`. Received: ...=...",
   "Warning: With `gradient_accumulation_steps=...` a learning-rate schedule counts micro-batches, not updates: ... of its steps are 100 updates. To make it count updates, write `...(keras_lso.schedules.PerUpdate(schedule, ...), gradient_accumulation_steps=...)`. If its steps are micro-batches on purpose, write `keras_lso.schedules.PerUpdate(schedule, 1)`. Received: learning_rate=..."
  ]
 },
 {
  "see": {
   "Large batches": "large-batches.html"
  },
  "messages": [
   "TypeError: LARC needs unscaled gradients, which Keras's own LossScaleOptimizer does not pass on. Write keras_lso.LossScaleOptimizer(keras_lso.LARC(inner_optimizer)).",
   "TypeError: `lr` is another name of `learning_rate`. Give one of them. Received: learning_rate=..., lr=...",
   "ValueError: LARC wraps a LossScaleOptimizer that has scaled no loss yet, so it cannot tell whether the gradients are scaled. In `fit` write LossScaleOptimizer(LARC(inner_optimizer)) instead. In a custom loop call `optimizer.scale_loss(loss)` first, or write `apply(..., scaled=True)` or `scaled=False`.",
   "ValueError: The paper's trust ratio is computed from the gradient, so trust_ratio='paper' needs classic_momentum=True. For popular momentum write trust_ratio='model_garden'. Received: classic_momentum=False",
   "ValueError: To call `trust_ratios`, ... must be built. Call `optimizer.build(trainable_variables)` first.",
   "ValueError: `weight_decay_rate` ...; `weight_decay` shrinks the weights separately from the step. Give one of them. Received: weight_decay_rate=..., weight_decay=.... as published has `weight_decay_rate` only.",
   "ValueError: mode='clip' divides by the learning rate, and a ... has no single one. Wrap each of its optimizers in its own LARC, or write mode='scale'.",
   "Warning: `weight_decay` of ... is Keras's, which shrinks the weights separately from the step. What papers, optax and PyTorch call the weight decay of ...: write `...(..., weight_decay_rate=...)`. If you mean Keras's, set `optimizer.weight_decay = ...` afterwards."
  ]
 },
 {
  "see": {
   "Scaling out": "scaling.html"
  },
  "messages": [
   "RuntimeError: A `tf.function` on several replicas cannot make the variables of an optimizer. Write `optimizer.build(model.trainable_variables)` inside `with strategy.scope():`, before the first step.",
   "RuntimeError: `...()` cannot be called in cross-replica context. Use `tf.distribute.Strategy.run` to enter replica context.",
   "ValueError: A gradient is the same on all devices of the axis already: leave `axis_name` out. Inside `jax.shard_map`, JAX adds up the gradients of variables that all devices share (`in_specs=P()`) on its own. For their mean, differentiate the `jax.lax.pmean` of the loss; to average them here, differentiate by `jax.lax.pcast(variables, axis_name, to='varying')`. Received: axis_name=...",
   "ValueError: The gradient of the variable ... is ..., and the variable itself holds ...: each process would apply another step. Shard a plain `torch.nn.Module`, and afterwards make its variables: `fully_shard(module); variables = [keras.Variable(p, name=n) for n, p in module.named_parameters()]`. A Keras model can be trained with `DistributedDataParallel` and, from Keras 3.16 on, by `fit` under a `keras.distribution.ModelParallel`, which shards its variables.",
   "ValueError: The gradient of the variable ... is ..., and the variable itself is .... Pass the gradient as it is sharded: `grad.redistribute(variable.value.device_mesh, variable.value.placements)`.",
   "ValueError: The gradient of variable '...' varies over the axes ... of a `jax.shard_map`, and the variable itself over .... If it is the gradient of this device's batch only, say `axis_name=...`, so that it is averaged. If the variable is the same on all devices, hand it and the optimizer's state in with `in_specs` that say so: `P()`.",
   "ValueError: The variable ... belongs to a Keras layer that `fully_shard` was applied to. Keras computes with the variable, which is not sharded, and its gradient is that of this process alone: the processes would drift apart. Shard a plain `torch.nn.Module`, and afterwards make its variables: `fully_shard(module); variables = [keras.Variable(p, name=n) for n, p in module.named_parameters()]`. A Keras model can be trained with `DistributedDataParallel` and, from Keras 3.16 on, by `fit` under a `keras.distribution.ModelParallel`, which shards its variables.",
   "ValueError: The variable ... is sharded, and the optimizer has a slot for it that is not, .... Pass an optimizer that has not been built yet; a `MultiOptimizer` cannot train sharded variables. Received: a ...",
   "ValueError: The variable ... was not made in the strategy's scope: all replicas would write to the same one, each its own step. Make the model and the optimizer inside `with strategy.scope():`, and call `optimizer.build(model.trainable_variables)` there.",
   "ValueError: `axis_name` is an axis of `jax.shard_map` or `jax.pmap`, which this Keras backend does not have: leave it out. On TensorFlow the replicas of a `tf.distribute.Strategy` add up their gradients on their own; on PyTorch `DistributedDataParallel` has averaged them already. Received: axis_name=...",
   "ValueError: `axis_name` must name an axis of the `jax.shard_map` or `jax.pmap` that this is called in. Under `jax.jit` alone, and with `keras.distribution`, XLA averages the gradients on its own: leave it out. Received: axis_name=..."
  ]
 },
 {
  "see": {
   "Coming from tf.keras 2": "migrating.html"
  },
  "messages": [
   "FileNotFoundError: There is no file at path=....",
   "TypeError: `loss_scale` must be a FixedLossScale or a DynamicLossScale. Received: loss_scale=.... Write keras_lso.LossScaleOptimizer(optimizer, loss_scale=...), which takes any.",
   "ValueError: '...' of the file might be taken for '...'. Name the layers as in the model that was saved: ....",
   "ValueError: ... Nothing was loaded. Received: path=...",
   "ValueError: A config with the key 'optimizer', as in TensorFlow 2.0 to 2.3, must hold a 'loss_scale'. Received: ...",
   "ValueError: Keras 3 has no optimizer with both a schedule and a `decay`, so the learning rate must be a number. Write the schedule so that it decays further. Received: learning_rate=..., decay=...",
   "ValueError: SavedModels and checkpoints of TensorFlow are not read. Load the weights in tf.keras, `model.load_weights(...)`, build the optimizer, and write `model.save('model.h5')`.",
   "ValueError: The `multiplier` of a DynamicLossScale must be 2 as `loss_scale`. Received: loss_scale=.... Write keras_lso.LossScaleOptimizer(optimizer, loss_scale=...), which takes any.",
   "ValueError: The file has state that has no place here: '...'.",
   "ValueError: The file holds ... slot variables, but ... for each of the ... variables that the optimizer was built for make .... Slots: .... If the optimizer is right, save the model as `.h5`, with the names of the slots.",
   "ValueError: The file holds no optimizer state. tf.keras writes it only if the model is compiled, has trained, and is saved as a whole, with `include_optimizer=True`. It never writes that of `tf.keras.optimizers.legacy` into a `.keras` file.",
   "ValueError: The file holds no optimizer state: it was saved before the first step.",
   "ValueError: The file holds the slot '...' of ... variables (...), but the optimizer was built for ...: ....",
   "ValueError: The file holds the state of ..., but the optimizer is ....",
   "ValueError: The file is damaged (...: ...). Nothing was loaded. Received: path=...",
   "ValueError: The file is neither an HDF5 file nor a `.keras` file, or it is damaged.",
   "ValueError: The file was written by Keras ..., not by tf.keras 2. Call `keras_lso.load_model(path)`, which loads the optimizer with the model.",
   "ValueError: The optimizer has other slots. Only in the file: .... Only in the optimizer: .... Construct it with the arguments (`momentum`, `amsgrad`, `centered`, `use_ema`, ...) of the one that was saved.",
   "ValueError: The optimizer has state that no file of tf.keras 2 holds: ....",
   "ValueError: The optimizer must be built before its state can be loaded. Call `optimizer.build(model.trainable_variables)` first.",
   "ValueError: `var_list` must be given with a tensor `loss`, or the optimizer be built: `optimizer.build(model.trainable_variables)`. Keras 3 keeps no list of all variables.",
   "Warning: The file holds no loss scale: that of the optimizer starts at initial_scale=....",
   "Warning: The learning rate in the file decays (decay=...), and that of a Keras 3 optimizer is constant. Give the optimizer `keras.optimizers.schedules.InverseTimeDecay(learning_rate, 1, ...)`.",
   "Warning: keras_lso.mixed_precision.experimental.LossScaleOptimizer is deprecated, as it was in TensorFlow. Write instead: keras_lso.LossScaleOptimizer(optimizer, loss_scale=...)"
  ]
 },
 {
  "see": {
   "Coming from TF1 and OpenSeq2Seq": "migrating-tf1.html"
  },
  "messages": [
   "AttributeError: LARC and gradient norm clipping should not be used together. Received: clip_gradients=..., larc_params=...",
   "NotImplementedError: A `learning_rate_decay_fn` cannot be saved. Pass a schedule in its place, such as `keras_lso.compat.open_seq2seq.PolyDecay(...)`.",
   "RuntimeError: This is compiled by `jax.jit` already, and assigns Keras variables. Call it outside `jax.jit` and the like.",
   "RuntimeError: To average gradients over processes (`on_horovod=True`), something must connect the processes, and nothing does. ...",
   "TypeError: The `loss` returns None. Does it end without `return`?",
   "TypeError: `...` is TF1's name for `...`: give one of them. Received: ...=..., ...=...",
   "ValueError: ... has no parameter .... It takes .... Received: ...=...",
   "ValueError: ..., with ... steps per epoch",
   "ValueError: An optimizer that is an instance has its parameters already. Set them there, or pass the class. Received: optimizer_params=...",
   "ValueError: The `loss` must return a scalar, such as `ops.mean(losses)`. It returned a tensor of shape ...",
   "ValueError: The optimizer has a learning-rate schedule of its own, or one that another training op gave it. Pass `learning_rate_decay_fn=None` to keep it, or another optimizer. Received: optimizer=...",
   "ValueError: The optimizer must not scale the loss by Keras's own means, a `loss_scale_factor` or Keras's LossScaleOptimizer. Leave them out, and write `dtype='mixed'` with `loss_scaling`. Received: optimizer=..., optimizer_params=...",
   "ValueError: There is no default model. Call `get_regularization_loss()` in the `loss` of an `optimize_loss(..., model=model)`, or pass the model: `get_regularization_loss(model)`.",
   "ValueError: There is nothing to train: the loss reads no trainable variable. Pass `var_list` or `model`.",
   "ValueError: With `iter_size=1` every call updates the variables. Write `optimize_loss(..., iter_size=n)` to accumulate the gradients of n batches. Received: skip_update=True",
   "ValueError: `learning_rate_decay_fn` determines the learning rate. Leave 'learning_rate' out of `optimizer_params`, or pass learning_rate_decay_fn=None. Received: optimizer_params=...",
   "ValueError: `loss_scaling_params` are for `loss_scaling='Backoff'` or 'LogMax'. Received: loss_scaling=..., loss_scaling_params=..."
  ]
 },
 {
  "see": {
   "Watch the loss scale": "troubleshooting.html#watch-the-loss-scale",
   "Which scale does a model need?": "which-setup.html#which-scale-does-a-model-need"
  },
  "messages": [
   "ImportError: Summaries are written by TensorBoard, which is not installed. Run `pip install tensorboard`, or `pip install \"keras-lso[tensorboard]\"`.",
   "ImportError: The plots need matplotlib, which is not installed. Run `pip install matplotlib`, or `pip install \"keras-lso[plot]\"`.",
   "ValueError: ... needs a model that was compiled with a keras_lso..... Write `model.compile(keras_lso....(optimizer), ...)`. Received: optimizer=...",
   "ValueError: SwapEMAWeights must be used when `use_ema=True` is set on the optimizer. Received: optimizer=...",
   "ValueError: SwapScheduleFreeWeights needs a model that a `keras.optimizers.ScheduleFreeAdamW` trains. Leave the callback out, or compile the model with one: `LossScaleOptimizer(keras.optimizers.ScheduleFreeAdamW())`. Received: optimizer=...",
   "ValueError: The optimizer already records its steps, but fewer than the `steps_per_execution=...` of `compile`, which StepRecord reads at once. Write `optimizer.record_steps(...)` where you call that method, or leave that call out. Received: length=...",
   "ValueError: With `beta_1=0` SwapScheduleFreeWeights cannot compute the average from the weights of a ScheduleFreeAdamW. Write `beta_1=0.9`. Received: beta_1=0.0",
   "ValueError: `hardware='auto'` knows CPUs, TPUs and NVIDIA's GPUs. Name hardware that is fast in the same dtypes: 'gpu:8.0' (bfloat16 and float16), 'gpu:7.5' (float16) or 'cpu' (float32). Received: devices ...",
   "ValueError: `record` has no steps. Train first.",
   "Warning: ... steps before step ... are missing from the record: the model makes several steps per batch. Call `optimizer.record_steps(length)` before `fit`, with a length of ... times the number of steps per batch."
  ]
 },
 {
  "see": {
   "Which set-up do I need?": "which-setup.html",
   "Loops of your own": "custom-loops.html"
  },
  "messages": [
   "AttributeError: `...` of a ... cannot be replaced: the state and the next step depend on the old one. Make a new one with a new inner optimizer, such as `inner_optimizer.from_config(inner_optimizer.get_config())`. Received: ...=...",
   "ImportError: Keras ... is newer than the versions that keras_lso was tested with, and lacks private attributes that keras_lso uses: .... Run `pip install \"keras>=3.12,<3.16\"`, or look for a newer keras_lso: `pip install --upgrade keras-lso`.",
   "ImportError: keras_lso supports Keras >=3.12. Found: Keras .... Run `pip install \"keras>=3.12,<3.16\"`.",
   "KeyError: Variable ... has no slot .... The slots are ....",
   "NotImplementedError: keras_lso differentiates no loss with the Keras backend .... Pass gradients to `apply`, or set KERAS_BACKEND to 'tensorflow', 'jax' or 'torch'.",
   "TypeError: A loss must be a tensor or a number. If you have several losses, scale their sum, or scale each separately. Received: loss=... of type ...",
   "TypeError: Argument `...` must not be a LossScaleOptimizer or a GuardedOptimizer, nor wrap one: the loss would be scaled twice, or steps counted twice. Pass its `inner_optimizer` instead. Received: ...=...",
   "TypeError: Argument `name` must be a string or None. To say whether the gradients are scaled, write `scaled=True` or `scaled=False`. Received: ...",
   "TypeError: The config of a ... must be a dict with strings as its keys, as `get_config` returns it. Received: config=... of type ...",
   "TypeError: `grads` holds variables and `trainable_variables` does not: the two are swapped. Write `optimizer.apply(grads, trainable_variables)`.",
   "TypeError: `grads` must hold gradients, not (gradient, variable) pairs. Write `optimizer.apply_gradients(pairs)`. Received: ... pairs",
   "ValueError: A SpikeGuard judges the mean gradient of a window, but each member of a MultiOptimizer has its own window. Leave out `spike_guard`, or the `gradient_accumulation_steps` of the members. Received: ... members",
   "ValueError: A `tape` is TensorFlow's: this Keras backend has none, and does not need it. Pass a `loss` without arguments to be called, and no `tape`. Received: tape=...",
   "ValueError: A gradient must be real: a variable of floats takes no imaginary part. Differentiate a real loss, or pass `keras.ops.real(gradient)`. Received: a gradient of dtype ... and shape ...",
   "ValueError: A gradient must have the shape of its variable: are `grads` in the order of `trainable_variables`? Received: a gradient of shape ... for the variable ... of shape ...",
   "ValueError: A gradient was written to after it was passed to `get_unscaled_gradients`, so it may be scaled or not. If it is scaled, as after `grad.mul_(factor)`, write `apply(..., scaled=True)`. If the unscaled gradient was copied into it, write `scaled=False`. Received: a gradient of shape ...",
   "ValueError: A loss must be real. Pass its absolute value, `keras.ops.abs(loss)`, or its real part, `keras.ops.real(loss)`. Received: loss=...",
   "ValueError: A variable that is trained must be real. Train the real and the imaginary part as two variables of floats, and write `ops.cast(real, ...) + 1j * ops.cast(imaginary, ...)` where the model needs a complex tensor. Received: the variable ... of dtype ...",
   "ValueError: Argument `...` holds a variable twice: ... and ... are the same, and would be updated twice per step. Add up its gradients, and pass the variable once.",
   "ValueError: Argument `...` must be a list of ... tensors, one for each variable that the optimizer was built with. Received .... If layers were frozen or unfrozen since, compile the model with a new optimizer.",
   "ValueError: Argument `inner_optimizer` is already wrapped by the LossScaleOptimizer .... Use that one, or wrap a new optimizer: `....from_config(optimizer.get_config())`. (To go on from the state of the old wrapper, call `new.build(variables)` and `new.set_weights(old.get_weights())`.) Received: inner_optimizer=...",
   "ValueError: Inside `jax.shard_map` Keras's `clipnorm` and `global_clipnorm` see the norms of a device's shards. Clip the gradients before they are applied, or shard the variables with `keras.distribution`. Received: clipnorm=..., global_clipnorm=...",
   "ValueError: No gradients provided for any variable of ..., a member of the MultiOptimizer. Compute the gradients of a loss that depends on its variables, or freeze their layers before the optimizer is built. Variables: ...",
   "ValueError: No gradients provided for any variable: `grads` holds only None, for ... variables. Compute the gradients of a loss that depends on `trainable_variables`.",
   "ValueError: On JAX a tensor does not know how it was computed, so it cannot be differentiated. Pass a `loss` without arguments to be called, such as `lambda: loss_fn(y, model(x))`. Received: loss=...",
   "ValueError: On TensorFlow `save_bad_batch` needs `steps_per_execution=1` and one replica: batches are taken in a compiled function otherwise. Leave out `save_bad_batch`. Received: steps_per_execution=...",
   "ValueError: Only variables that are not trainable take synchronization='on_read'. Received: trainable=...",
   "ValueError: PyTorch cannot differentiate through a step, which writes tensors in place. For the gradients of its result alone pass `[g.detach() for g in grads]`, or call `stateless_apply` under `torch.no_grad()`. To differentiate the step as well, write it as a function of your own. Received: a gradient or a value of the optimizer's own of shape ... with requires_grad=True",
   "ValueError: Some of the gradients are the scaled arguments of `get_unscaled_gradients`, and others are not. Pass either all of its results, or all of its arguments, or say which they are with `scaled=True` or `scaled=False`. Received: ... of ... gradients are its arguments",
   "ValueError: The ... has been built, and from Keras 3.16 on `build`, which `fit` and the first step call, decides which variables decay. Make a new optimizer, and call the method before it: `optimizer = ...(...); optimizer.exclude_from_weight_decay(...)`. Received: var_list=..., var_names=...",
   "ValueError: The environment variable KERAS_LSO_KERNELS must be 'framework', 'compile' or 'generic'. Received: KERAS_LSO_KERNELS=...",
   "ValueError: The file is not a record of steps, which has the columns .... Give the path of a new file. Received: path=..., with ...",
   "ValueError: The inner optimizer has been built already, with slots of its own dtype. With `slot_dtype`, pass an optimizer that has not been used. Received: inner_optimizer=...",
   "ValueError: The inner optimizer has loss_scale_factor=..., by which it would divide gradients that LossScaleOptimizer has unscaled already. Set it to None. For a fixed loss scale write `LossScaleOptimizer(inner_optimizer, dynamic=False, initial_scale=...)`.",
   "ValueError: The optimizer has not yet been built: call `optimizer.build(trainable_variables)` before `set_weights`.",
   "ValueError: The step has created variables, or given a buffer another shape or dtype: there are no values to restore. Build the model first: call it on a batch or call `model.build(...)`. Keep a tensor that changes its shape as a plain attribute of the module. Received: ...",
   "ValueError: The variable ... was made with dtype ..., and its tensor was cast to ... since, as `module.half()` and `module.to(dtype)` do: small steps would be lost. Cast the module before you make the variables and the optimizer, or cast a copy of it, `copy.deepcopy(module).half()`.",
   "ValueError: To call `stateless_apply`, ... must be built (i.e. its variables must have been created). You can build it via `optimizer.build(trainable_variables)`.",
   "ValueError: Unknown variable: .... This optimizer can only be called for the variables it was originally built with. When working with a new set of variables, you should recreate a new optimizer instance. Received: optimizer=...",
   "ValueError: Variable ... has `None` for gradient: `loss` does not depend on it, or through an operation without a derivative, such as `ops.argmax` or `ops.round`. Leave it out of `params`.",
   "ValueError: When passing `grads` without `trainable_variables`, the optimizer must be built: call `optimizer.build(trainable_variables)` first.",
   "ValueError: With `keras.config.set_nnx_enabled(True)` `fit` calls the `train_step` of the model's class, which cannot be changed for one model. Turn NNX off.",
   "ValueError: With `slot_dtype=...` each step is by a formula of this package, which cannot make this step. It needs a gradient for each variable if the optimizer has `use_ema` or `gradient_accumulation_steps`; on PyTorch, contiguous weights (no `channels_last`) on a CPU or a CUDA device, and a call of `apply` outside of `torch.compile`; on TensorFlow, one device or a `MirroredStrategy`. Nothing was changed. Received: inner_optimizer=...",
   "ValueError: `...` must lie between `min_scale` and `max_scale`. Received: ...=..., min_scale=..., max_scale=.... Choose another scale, or widen the bounds.",
   "ValueError: `grads` and `trainable_variables` must match one-to-one. Received ... gradients for ... variables. Pass None for a variable without a gradient.",
   "ValueError: `layers` must be unambiguous, but several layers are called .... Write one of the paths ..., or pass the layer object.",
   "ValueError: `layers` must hold names, paths or layers of the model, which has no .... Similar are: ...",
   "ValueError: `loss_scale` is for the gradients, but there are none. Compile the model with a loss, and pass the targets as `y`. Received: loss_scale=...",
   "ValueError: `model` must be remade from its config, but ... cannot. Write a `get_config` that returns the arguments of `....__init__`. Received: ..., and the error: ...",
   "ValueError: `model` must be remade from its config, but the result has other layers or weights. Make `....get_config` return the arguments of `__init__`, and write a `build`. Received: model=...",
   "ValueError: `model` must not be quantized, since such weights are no floats. Take the model from before `quantize`. Received: the layer ...",
   "ValueError: `protect_statistics` needs a `keras_lso....`, which tells which step was skipped. Write `model.compile(keras_lso....(optimizer), ...)`. Received: model.optimizer=...",
   "ValueError: `slot_dtype=...` needs weights that are trained in float32: float32 weights, or 16-bit weights with masters, such as `master_weights='stochastic'`. Received: weights that are trained in ...",
   "ValueError: `slot_dtype=...` rounds the moments of an optimizer by its own formula, which exists for ..., without `amsgrad`, `centered` and RMSprop's `momentum`, with one kind of clipping, and for variables without a constraint. Leave `slot_dtype` out, or set a changed attribute back. Received: inner_optimizer=...",
   "ValueError: `tape` is required when a Tensor loss is passed to `minimize`: the `tf.GradientTape` under which it was computed. Without one, a tensor can be differentiated in a `tf.function` only. Or pass a `loss` without arguments to be called. Received: loss=...",
   "ValueError: `y` and `sample_weight` must not be given if `x` is a ...: it yields them with the inputs.",
   "ValueError: stateless_apply is not supported with the TensorFlow backend (as it is incompatible with tf.distribute). Call `optimizer.apply` instead.",
   "Warning: ... trains float16 variables without float32 master weights, and its ... is 0 in float16: a weight whose gradient is 0 would become NaN. Write `epsilon=1e-7`, or leave out `master_weights=False`.",
   "Warning: A MultiOptimizer has no weight decay of its own to exclude variables from, so nothing is excluded. Call `exclude_from_weight_decay` of its optimizers that use weight decay.",
   "Warning: A pattern matches no variable, and excludes none: ...",
   "Warning: LossScaleOptimizer divides gradients by the loss scale, but no loss has been multiplied by it: the steps are too small by that factor. In your own training step, scale the loss before you differentiate it: ... Or say what the gradients are: `apply(..., scaled=False)` if the loss is not scaled, `scaled=True` if you have multiplied the loss by `optimizer.loss_scale`.",
   "Warning: Saved files will not hold the dtype policies of ..., since the config of the layer or model that makes them does not. In its `__init__` pass `dtype` on to them, or remake the model after loading, by `keep_in_float32` or `apply`.",
   "Warning: The new model is not compiled: call its `compile`. An optimizer or metric of `model` cannot be remade from its config: ...",
   "Warning: keras_lso is not tested with Keras's backend .... Steps run in `keras.ops`, without fast paths: compare a float32 run with one without this package first. Tested are 'tensorflow', 'jax' and 'torch'",
   "Warning: keras_lso was tested with Keras >=3.12,<3.16. Found: Keras ..., which is newer, and has the private names that keras_lso uses, but they may do something else. Look for a newer keras_lso, `pip install --upgrade keras-lso`, or run `pip install \"keras>=3.12,<3.16\"`.",
   "Warning: torch.compile has failed, and the steps of 16-bit weights and slots run without it, by the same formulas. The cause: ...: ..."
  ]
 }
];
